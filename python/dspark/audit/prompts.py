"""The prompts of an audit when none are given."""

CODE = (
    "def mean(values):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import json\nimport os\n\n\ndef load(path):\n",
    "    for name, value in sorted(",
    "        if not isinstance(",
    '    """Return True if ',
    "try:\n    import",
    "        self._lock = ",
)
"""For models of program text: beginnings of the kind of code that most files hold."""

GENERAL = (
    "The harbour was quiet that morning. Two men were mending a net, and",
    "To make bread you need four things: flour, water, salt and",
    "Question: A train leaves at 9:40 and arrives at 11:25. How long does the journey take?\nAnswer:",
    "Write a short letter to a neighbour who has looked after your plants.\n\nDear",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Why is the sky dark at night? The simplest answer is that",
    "Liste der Planeten, von innen nach außen: Merkur, Venus,",
)
"""For general models: prose, a recipe, sums, a letter, code, another language."""
