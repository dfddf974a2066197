"""Commands that start a process: demo, train, run, predict, sweep, data, chat."""
