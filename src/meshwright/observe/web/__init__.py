"""The page that shows runs: a server for a browser on this machine, and the same page as one file."""
