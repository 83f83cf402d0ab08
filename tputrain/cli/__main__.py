"""`python -m tputrain.cli`."""

import sys

from tputrain.cli import main

sys.exit(main())
