"""What a bundle costs on a piece of hardware, before anyone buys or flashes it.

So far the room holds one piece, `systolic`: the compute cycles of a matrix product on a systolic array, which every
cost figure for the FPGA profile rests on. Needs the standard library only. DESIGN section 5.
"""
