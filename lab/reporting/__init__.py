"""The lab's output: `console` has the lines of a run, `progress` what a long step says, `tensorboard` its curves."""
