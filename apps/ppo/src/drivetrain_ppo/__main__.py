import sys

from drivetrain_ppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
