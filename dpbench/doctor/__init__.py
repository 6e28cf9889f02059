"""What works on this machine, found out before anything is spent on measuring."""
