"""`meshwright bench`: one training step of Meshwright and of its peers on this machine, side by side."""
