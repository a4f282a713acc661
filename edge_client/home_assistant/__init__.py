"""A device's camera in Home Assistant: its answers as entities, and a choice there is a label here.

`discovery` makes the one message that Home Assistant makes the entities of; `steady` says which answer is shown, and
`flood` how many choices are acted upon; `house` is the connection to the broker, with what is published and what a
choice does; `removal` takes all away again.
"""
