"""trainbus side by side with its peers, in one process and in alternation: ``python -m benchmarks``.

``checkpoint``, ``dispatch``, ``ema``, ``logging``, ``offload`` and ``training`` describe their comparisons; ``peers`` holds one
module per library with everything that library is asked to do, so that its users can judge whether it is used well;
``harness`` holds the method and ``report`` the table, the JSON file and the chart.
"""
