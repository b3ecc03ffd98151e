"""TOKENS random words in lines of 20, which fairseq gives an end of sentence each: text.py TOKENS"""

import random
import sys

draw = random.Random(0)
for _ in range(int(sys.argv[1]) // 20):
    print(*(f"w{draw.randrange(1000)}" for _ in range(19)))
