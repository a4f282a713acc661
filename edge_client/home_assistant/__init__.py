"""A device's camera in Home Assistant: its answers as entities, and a choice there is a label here.

`discovery` makes the one message that Home Assistant makes the entities of; `steady` says which answer is shown;
`house` is the connection to the broker, with what is published and what a choice does; `removal` takes all away again.
"""
