"""Photos to answers, with what the device knows.

`knowledge` reads what is known from a state directory; `predictor` answers;
`class_shares` counts what the device sees; `suggestions` says which photos to name;
`answer_publisher` sends answers to a broker, where that is asked for.
"""
