"""python -m shardwright.cli"""

import sys

from . import main

sys.exit(main())
