# SPDX-License-Identifier: Apache-2.0
"""`python -m anyaccel`: the same as the `anyaccel` command."""

import sys

from anyaccel.cli import main

sys.exit(main())
