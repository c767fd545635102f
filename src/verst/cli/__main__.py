"""`python -m verst.cli`: the command without its script."""

from verst.cli.main import main

if __name__ == "__main__":
    main()
