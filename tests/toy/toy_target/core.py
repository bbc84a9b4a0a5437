"""What the engine tests patch: a class, a function that uses it, and a name copied elsewhere."""


class Base:
    def inherited(self):
        return "inherited"


class Builder(Base):
    @classmethod
    def gate(cls, value):
        return ("stock gate", cls.__name__, value)

    def build(self, value):
        return ("stock build", value)


def plan(value):
    return ("stock plan", value)
