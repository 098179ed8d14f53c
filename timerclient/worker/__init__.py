"""Workers: handlers of timers as functions of an application, and the process that runs them.

Begin with `timer_app.py`: an application's handlers, and how it schedules their timers. `worker.py`
runs all of them, `handler_runner.py` one. Only the CLI, `timerfake` and applications import this.
"""
