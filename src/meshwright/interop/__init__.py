"""Configurations of other trainers, read and written: interop.md is the guide."""

FORMS = ("run", "deepspeed", "megatron", "accelerate", "torchtitan")
"""What a plan is written as: our own run file first."""
