"""`python -m tokenfeed` is the command `tokenfeed`."""

from tokenfeed.tools.main import main

if __name__ == "__main__":
    main()
