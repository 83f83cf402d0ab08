"""`python -m tputrain`: the command, also where its script is not on the PATH."""

import sys

from tputrain.cli import main

sys.exit(main())
