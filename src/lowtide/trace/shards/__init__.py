"""The step of one device: forward operators on the Rects that it has, and what moves between devices.

Takes a Joint and Shards; gives a graph whose every node calls an operator that autograd knows, the exchanges
too, so that it can be differentiated.

From outside: ``device_step``, ``kinds``, ``local``, ``picture``, ``prices``, ``reads``, ``sums``, ``ways``.
"""
