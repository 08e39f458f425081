"""The figures of the Marconi paper (arXiv 2411.19379) on our traces, beside the paper's numbers.

`python benchmarks/cache/policies.py --figures all` makes them. A figure is a function of `Runs` (which makes every run
once) and a `Setup` (what is run), and returns a `Figure`: tables, a chart, and in words what the paper shows and what
came out here.
"""
