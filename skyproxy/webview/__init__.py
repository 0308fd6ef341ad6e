"""The web view: what workers and this program do, watched now and then, and served to a browser on this machine.

It reads and changes nothing. `history` watches, `server` speaks HTTP on loopback, `workers` asks workers, `program`
adds what only this program knows: lines, queues, pools and profiles. Only `program` needs torch.
"""
