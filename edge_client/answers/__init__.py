"""Photos to answers, with what the device knows.

`knowledge` reads what is known from a state directory; `predictor` answers;
`answer_publisher` sends answers to a broker, where that is asked for.
"""
