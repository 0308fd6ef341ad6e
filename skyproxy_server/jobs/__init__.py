"""Jobs of clients on this worker: processes that outlive their clients, with records on disk. No torch here.

What a job runs, only its own process reads; here it is bytes in a file, started, watched, logged and ended.
"""
