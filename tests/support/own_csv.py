"""A source of training data in one file: the rows of a .csv file."""

import csv

import megazoo


@megazoo.data.register_source
class CSV(megazoo.data.Rows):
    suffixes = (".csv",)

    def rows(self):
        with open(self.path, newline="") as file:
            yield from csv.DictReader(file)
