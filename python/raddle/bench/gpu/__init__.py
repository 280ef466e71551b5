"""``raddle bench gpu``: Raddle beside other engines on one GPU, in interleaved rounds of one process.

``cases`` and ``sections`` say what is measured, ``problem`` makes the tensors, ``own`` is Raddle on them, ``variants`` and ``check`` have the exact
outputs, ``measure`` does a section beside the ``floor`` of reading, ``host`` and ``planner`` do those that measure the
host and plans made by the GPU, ``process`` runs sections in processes of their own.
"""
