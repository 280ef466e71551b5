"""``raddle bench gpu``: Raddle beside other engines on one GPU, in interleaved rounds of one process.

``cases`` and ``sections`` say what is measured, ``problem`` makes the tensors, ``engines`` call them, ``check``
compares the outputs, ``timing`` and ``floor`` measure, ``measure`` does a section, ``host`` and ``first_use`` do
those that measure the host, ``report`` prints, ``process`` runs sections in processes of their own.
"""
