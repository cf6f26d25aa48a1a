"""`python -m dspark.cli` is the same as `dspark`."""

import sys

from dspark.cli.main import main

sys.exit(main())
