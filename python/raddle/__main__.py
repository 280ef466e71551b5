"""`python -m raddle`: the command `raddle`."""

from raddle.cli import main

if __name__ == "__main__":
    main(prog_name="python -m raddle")
