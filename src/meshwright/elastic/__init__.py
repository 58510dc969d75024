"""Training that goes on after faults: who starts ranks again, who watches them, what is told of it."""
