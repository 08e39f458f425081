"""The first hour on a GPU: two scripts, first.sh and second.sh, and what they call."""
