"""The benchmarks of ``raddle bench``: an instrument beside the library, which imports nothing from here.

``cli`` and ``options`` are the commands, ``timing`` the clocks of CPUs and GPUs and the rounds in which engines take
turns, ``engines`` what an engine is, ``peers`` those of others, ``results`` and ``report`` figures, rows and tables. On a CPU ``workloads`` says what
is measured, ``batch`` makes the tensors, ``paged`` is Raddle on them, ``compare`` does a workload, ``limits`` measures the machine; on a GPU `gpu` has
their counterparts. The other modules have the figures of one command each.
"""
