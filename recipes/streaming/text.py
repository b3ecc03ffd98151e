"""Prints TOKENS random words in lines of 19, to each of which fairseq adds an end of sentence: text.py TOKENS"""

import random
import sys

draw = random.Random(0)
for _ in range(int(sys.argv[1]) // 20):
    print(*(f"w{draw.randrange(1000)}" for _ in range(19)))
