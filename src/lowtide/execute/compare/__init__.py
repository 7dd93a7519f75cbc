"""A step run by eager PyTorch and by a Program, side by side: results, peaks, times, timelines.

Takes a function and a Program, a plan or a way to cut; gives what ``lowtide run``, ``profile`` and ``tile``
show.

From outside: ``compare``, ``graphs``, ``profile``, ``shards``, ``tiles``, ``watch``.
"""
