"""`python -m meshwright` is `meshwright`."""

import sys

from meshwright.cli.main import main

sys.exit(main())
