"""A process for each session: what starts, supervises, bounds and ends them, and brings them their connections.

The supervisor's side never loads torch: it has the listener, the token and TLS, and answers whatever a session does.
`template` and `session_process` run in other processes; everything else here runs in the supervisor, too.
"""
