"""Values of the client: errors, results, ids, settings, events and the lease clock.

Applications meet these types through `timerclient`.
"""
