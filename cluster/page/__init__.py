"""The status page of a node: one HTML, one CSS and one JavaScript file, and the JSON that it polls.

`page_routes.py` has the paths, `page_data.py` their answers. `node/` alone imports from here.
"""
