"""The first hour on a GPU: three scripts, first.sh, second.sh and call_1.sh, and what they call."""
