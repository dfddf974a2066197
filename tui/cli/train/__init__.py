"""Commands that start something: demo, train, run, predict, sweep, data, chat."""
