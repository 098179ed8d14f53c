"""A local cluster (`timerctl local`), certificates, tokens, and files for hosts and Kubernetes.

`local.py` runs the nodes; the chaos suite, the demo and the benchmarks use it, too.
`certificate_commands.py` and `token_commands.py` are `timerctl certs` and `timerctl tokens`. The
folders have systemd units, container images, manifests, a chart, alerts and packages.
"""
