"""``raddle replay``: a continuous-batching serving loop over attention, fed by a request trace.

Read in this order: `traces` (what arrives), `scheduler` (what each step computes; `speculation`: drafts), `engine`
(append, plan and run of one step; `cuda`: on a GPU), `serving` (the loop and its virtual clock), `sampling` (which
outputs are checked against the fp64 reference), `report` (what is said about it; `page`: with pictures), `cli`.
"""
