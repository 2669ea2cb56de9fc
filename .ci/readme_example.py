"""Print the README's first block of Python, for an environment with nothing but the wheel."""

import re
from pathlib import Path

print(re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[0])
