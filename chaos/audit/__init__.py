"""The audit: a Spark job that gives every timer one verdict, from three independent witnesses.

    asked   the clients' requests and their answers   histories/   rules/clients.sql
    log     the entries in the nodes' own logs        <node>/log   rules/node_logs.py, chaos/oracle/
    given   the messages that consumers got and acked histories/   rules/clients.sql

        asked  --- mark ---  log  --- seq ---  given

The joins are full outer joins, so every row of any witness is judged. The nodes wrote the log, and
the audit does not trust it alone. The frames of a majority must be equal on all nodes
(node_logs.py). The answers to clients (ids, due times, offsets, firing times) must follow from it
(verdicts.sql). Duplicates are counted before any grouping. A run can be judged if it was drained:
its clients went on until every due timer had arrived.

    command.py   options and exit status
    job.py       the audit of one run: read (histories.py), replay, judge, write
    rules/       the violations: SQL queries (queries.py), and a few functions
    report/      figures; one line, text, JSON, HTML

docs/audit.md describes its use, on one machine and on a cluster. Spark reads and writes Parquet
files in the run's folder. The driver collects only figures.
"""
