"""Writes the dictionary of a pretrained model: python -m fw_fairseq.pretrained.dictionary FOLDER DICTIONARY"""

import sys

from .folders import load_config, write_dictionary

if __name__ == "__main__":
    folder, path = sys.argv[1:]
    write_dictionary(load_config(folder), path)
