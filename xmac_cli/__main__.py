"""`python -m xmac_cli` is the same command as `xmac`."""

from xmac_cli.app import main

if __name__ == "__main__":
    main()
