"""trainbus side by side with its peers, in one process and in alternation: ``python -m benchmarks``.

- ``checkpoint``, ``dispatch``, ``ema``, ``logging``, ``offload`` and ``training`` describe their comparisons.
- ``peers`` has one module per library with all of its jobs, so that its users can judge whether it is used well.
- ``harness`` has the method, and ``report`` the table, the JSON file and the chart.
"""
