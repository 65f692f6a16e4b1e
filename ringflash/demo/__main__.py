"""`python -m ringflash.demo`, alone or under torchrun, mpiexec or srun."""

import sys

from ringflash.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
