"""The audit: a Spark job that gives every timer one verdict, from three independent witnesses.

    asked   what clients asked and were answered      histories/         client_tables.py
    log     what the nodes' own logs say happened     <node>/log         node_logs.py, chaos/oracle/
    given   what consumers received and acked         histories/         client_tables.py

        asked  --- mark ---  log  --- seq ---  given        full outer joins: whatever any
                                                            one witness knows is judged

The log is the nodes' word, so it is cross-examined: frames on a majority must be the same on all
nodes (node_logs.py), and what clients were told (ids, due times, offsets, firing times) must be
what follows from it (verdict.py). Duplicates are counted before anything is grouped away. The audit
judges a run that was drained: clients went on until everything due had come.

    clients nodes verdict        DataFrame -> DataFrame, pure: the judgement
    rules nacks handing_out ordering   what no verdict of a timer shows, into the summary: beside
    files                        what nodes' state files hold, against their logs
    plain sieve                  of a large run, what needs no such judgement, by columns
    faults figures               windows of faults; lateness, gaps, redeliveries, throughput
    job session command          one run: read, replay, judge, write; Spark; exit status
    report page chart about      one line, text, JSON, HTML; what the run says of itself

docs/audit.md says how to run it, here and on a cluster. Spark lives in a run's folder only:
Parquet in, Parquet out, nothing collected but figures.
"""

from chaos.audit.command import main, run_audit
from chaos.audit.job import audit
from chaos.audit.report.report import Report, describe
from chaos.spark.session import spark_session

__all__ = ["Report", "audit", "describe", "main", "run_audit", "spark_session"]
