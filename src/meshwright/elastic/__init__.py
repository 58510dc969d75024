"""Training that goes on after faults: ranks are looked after, ended as a whole and started again."""
