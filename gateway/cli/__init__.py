"""Commands, one file each: HELP, add_arguments(parser) and run(args) -> exit code.

Exit codes: 0 ok, 1 failed, 2 bad usage or configuration.
"""
