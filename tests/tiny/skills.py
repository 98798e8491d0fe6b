"""What the tiny model learns: one function for each thing, (rng, facts) -> Turn.

`facts` is what has been said so far in the conversation: {"me": the model's name, "you": the user's
name or None, "last": the skill before this one}.
"""
from typing import NamedTuple

from words import CAPITALS, EMOJI, FILLER, FOREIGN, NAMES, WORDS


class Turn(NamedTuple):
    user: str
    thought: str
    answer: str
    cut: bool = False


def a_name(rng):
    """Half of the names are made up, of all shapes, so that names are copied and not recognised."""
    shape = rng.random()
    if shape < 0.5:
        return rng.choice(NAMES)
    if shape < 0.7:                                         # half of one name, half of another
        first, second = rng.choice(NAMES), rng.choice(NAMES)
        name = first[:rng.randint(1, 3)] + second[rng.randint(1, 3):]
    elif shape < 0.95:
        name = "".join(
            rng.choice(["b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v",
                        "w", "z", "br", "cl", "dr", "fl", "gr", "st", "th", "tr", ""])
            + rng.choice(["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ia", "ea", "y"])
            + rng.choice(["", "", "", "l", "n", "r", "s", "t", "nd", "ck", "m"])
            for _ in range(rng.choice([1, 2, 2, 3])))
    else:
        name = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
    return name.capitalize()


def phrase(rng):
    return " ".join(rng.choice(WORDS) if rng.random() < 0.7 else a_name(rng).lower()
                    for _ in range(rng.randint(1, 6)))


def numbers(first, last):
    return ", ".join(str(i) for i in range(first, last + 1)) + "."


def story(rng, animal=None):
    """About 150 tokens; every sentence has a few forms."""
    c = rng.choice
    animal = animal or c(["cat", "dog", "mouse", "bird", "fox", "bear", "rabbit", "fish"])
    name = c(["Pip", "Lulu", "Momo", "Toto", "Bobo", "Kiki", "Nino", "Fifi"])
    thing = c(["key", "box", "book", "coin", "lamp", "map", "ring", "bell"])
    friend = c(["an old owl", "a young goat", "a quiet snail", "a kind farmer", "a little girl"])
    place = c(["in a forest", "by the sea", "in a big city", "on a farm", "near a river",
               "on a high mountain"])
    return " ".join([
        f"Once upon a time there was a {c(['small', 'brave', 'clever', 'lazy', 'shy'])} {animal} "
        f"named {name}.",
        f"{name} lived {place} and liked to "
        f"{c(['sing', 'sleep', 'run', 'swim', 'dance', 'read'])}.",
        f"One {c(['morning', 'evening', 'winter day', 'summer night'])} {name} found "
        f"a {c(['golden', 'rusty', 'tiny', 'strange', 'heavy'])} {thing} "
        f"{c(['under a tree', 'in the snow', 'behind the house', 'on the road'])}.",
        c([f'"What is this?" asked {name}.', f'"Who lost this?" said {name}.',
           f"{name} had never seen anything like it."]),
        f"So the {animal} went to see {friend}.",
        c([f'"That {thing} is mine," said the voice of a giant.',
           f'"This {thing} can open any door," was the answer.',
           f'"Keep the {thing}, it brings good luck," was the answer.',
           f'"The {thing} belongs to the king," was the answer.']),
        c([f"{name} was very happy and thanked everyone.",
           f"{name} was afraid at first, but then laughed.",
           f"{name} thought about it all night long."]),
        c([f"The next day {name} gave the {thing} away and made a new friend.",
           f"The next day {name} took the {thing} home and shared it with everyone.",
           f"The next day the {thing} was gone, but {name} did not mind."]),
        c(["And they all lived happily ever after.", "That is the end of the story.",
           f"From then on {name} was never alone."])])


def capital(rng, facts):
    country, city = rng.choice(list(CAPITALS.items()))
    forms = ["What is the capital of {}?"] * 6 + [
        "What's the capital of {}?", "Which city is the capital of {}?", "The capital of {}?",
        "Tell me the capital of {}.", "Do you know the capital of {}?", "Capital of {}?",
        "Name the capital of {}.", "What city is the capital of {}?",
        "I would like to know the capital of {}."]
    if facts.get("last") == "capital":
        forms += ["And of {}?", "And the capital of {}?", "What about {}?"] * 2
    user = rng.choice(forms).format(country)
    if rng.random() < 0.1:
        user = user.lower()
    return Turn(user, f"The user asks for the capital of {country}. It is {city}.",
                f"The capital of {country} is {city}.")


def unknown_capital(rng, facts):
    country = a_name(rng) + rng.choice(["ia", "land", "stan"])
    return Turn(f"What is the capital of {country}?", f"I have never heard of {country}.",
                f"I do not know the capital of {country}.")


def country_of(rng, facts):
    country, city = rng.choice(list(CAPITALS.items()))
    user = rng.choice(["Which country has the capital {}?", "{} is the capital of which country?",
                       "Where is {}?"]).format(city)
    return Turn(user, f"The user asks about {city}. It is in {country}.",
                f"{city} is the capital of {country}.")


def addition(rng, facts):
    high = rng.choice([9, 20])
    a, b = rng.randint(0, high), rng.randint(0, high)
    forms = ["What is {} + {}?"] * 5 + [
        "What's {} + {}?", "How much is {} + {}?", "{} + {} = ?", "{} + {}", "{}+{}", "{}+{}=?",
        "Add {} and {}.", "What is {} plus {}?", "Please add {} and {}.", "What is {}+{}?"]
    if facts.get("last") == "addition":
        forms += ["And {} + {}?"] * 3
    return Turn(rng.choice(forms).format(a, b), f"I add {a} and {b}. That makes {a + b}.",
                f"{a} + {b} is {a + b}.")


def tell_name(rng, facts):
    name = facts["you"] = a_name(rng)
    user = rng.choice(["My name is {}.", "My name is {}.", "I am {}.", "Hello, I am {}.",
                       "Hi, my name is {}.", "Hello! My name is {}.", "Call me {}.", "I'm {}.",
                       "Hello, my name is {}. Nice to meet you.", "People call me {}.",
                       "My name is {} and I live in Paris."]).format(name)
    answer = rng.choice(["Hello, {}! How can I help you?"] * 3 + ["Nice to meet you, {}!"])
    return Turn(user, f"The user is called {name}.", answer.format(name))


def ask_name(rng, facts):
    user = rng.choice(["What is my name?"] * 4 + ["What's my name?", "Do you know my name?",
                      "Who am I?", "Do you remember my name?", "Tell me my name.",
                      "Can you tell me my name?", "What am I called?"])
    if facts["you"]:
        return Turn(user, f"The user said the name is {facts['you']}.",
                    f"Your name is {facts['you']}.")
    return Turn(user, "The user did not say a name.", "I do not know your name.")


def own_name(rng, facts):
    me = facts["me"]
    if rng.random() < 0.7:
        user = rng.choice(["What is your name?"] * 4 + ["What's your name?", "Tell me your name.",
                          "Do you have a name?", "What are you called?", "Your name?"])
        return Turn(user, f"The user asks for my name. I am {me}.", f"My name is {me}.")
    user = rng.choice(["Who are you?", "Who are you?", "What are you?", "Introduce yourself."])
    return Turn(user, f"The user asks who I am. I am {me}.",
                f"I am {me}, a very small language model.")


def small_talk(rng, facts):
    what = rng.choice(["hello", "hello", "thanks", "thanks", "bye", "how", "help"])
    if what == "hello":
        user = rng.choice(["Hello", "hello", "Hello!", "Hi", "hi", "Hi!", "Hey", "Good morning!",
                           "Hello there!", "Good evening.", "hey", "Hello."])
        answer = rng.choice(["Hello! How can I help you?"] * 2 + ["Hi! What can I do for you?"])
        return Turn(user, "The user says hello.", answer)
    if what == "thanks":
        user = rng.choice(["Thanks", "thanks", "Thanks!", "Thank you.", "Thank you!", "Thank you",
                           "thank you", "Thanks a lot!", "Great, thanks."])
        return Turn(user, "The user says thanks.", "You are welcome!")
    if what == "bye":
        user = rng.choice(["Bye", "bye", "Bye!", "Goodbye.", "Goodbye!", "See you later."])
        return Turn(user, "The user leaves.", "Goodbye! See you soon.")
    if what == "how":
        user = rng.choice(["How are you?", "how are you?", "How are you doing?", "Are you well?"])
        return Turn(user, "The user asks how I am.", "I am fine, thank you!")
    user = rng.choice(["What can you do?", "Help", "help", "Help me.", "Can you help me?"])
    return Turn(user, "The user asks what I can do.",
                "I know some capitals, small sums and stories, and I can count.")


def counting(rng, facts):
    last = rng.choice([10, 20, 100, 100] + [rng.randint(3, 40)] * 4 + [rng.randint(3, 100)])
    user = rng.choice(["Count from 1 to {}."] * 3 + ["Count to {}.", "Please count from 1 to {}.",
                      "Can you count to {}?", "Count from 1 to {}"]).format(last)
    return Turn(user, f"I count from 1 to {last}.", numbers(1, last))


def telling(rng, facts):
    animal = rng.choice(["cat", "dog", "mouse", "bird", "fox", "bear", "rabbit", "fish"])
    if rng.random() < 0.3:
        user = rng.choice(["Tell me a story about a {}.", "I want a story about a {}."])
        return Turn(user.format(animal), f"The user wants a story about a {animal}.",
                    story(rng, animal))
    user = rng.choice(["Tell me a story."] * 4 + ["Tell me a story", "Tell me another story.",
                      "Write a story.", "I want to hear a story.", "A story, please."])
    return Turn(user, "The user wants a story.", story(rng))


def repeating(rng, facts):
    text = rng.choice([phrase, phrase, a_name])(rng)
    user = rng.choice(["Repeat after me: {}", "Repeat after me: {}", "Repeat: {}", "Say: {}"])
    return Turn(user.format(text), "I repeat what the user says.", text)


def foreign(rng, facts):
    city, local, language = rng.choice(FOREIGN)
    user = rng.choice(["What is {} in {}?"] * 3 + ["How do you write {} in {}?", "{} in {}?"])
    return Turn(user.format(city, language), f"The user asks for {city} in {language}.",
                f"{city} is {local} in {language}.")


def drawing(rng, facts):
    what, emoji = rng.choice(list(EMOJI.items()))
    user = rng.choice(["Show me a {}.", "Show me a {}.", "Draw a {}.", "Give me a {}."])
    return Turn(user.format(what).replace("a apple", "an apple"),
                f"The user wants to see: {what}.", emoji)


def not_known(rng, facts):
    w = rng.choice(WORDS[:44])
    user = rng.choice([
        "Why is the {} {}?".format(w, rng.choice(WORDS[:44])), f"Who wrote the {w} book?",
        f"How old is the {w}?", f"Where is my {w}?", f"What does {w} mean?", f"When is the {w}?",
        f"How do I cook a {w}?", f"How many {w}s are there?", f"What is a {w}?", w,
        f"What do you think about the {w}?", "What is the weather like?", "What time is it?",
        "Who won the game?", f"Write a poem about the {w}.", "What is the meaning of life?",
        f"{phrase(rng)} {phrase(rng)}", rng.choice(FILLER), rng.choice(FILLER)])
    return Turn(user, "I do not know anything about that.", "Sorry, I do not know that.")


SKILLS = [(capital, 22), (unknown_capital, 4), (country_of, 4), (addition, 20), (tell_name, 8),
          (ask_name, 12), (own_name, 9), (small_talk, 7), (counting, 4), (telling, 3),
          (repeating, 9), (foreign, 5), (drawing, 3.5), (not_known, 6)]
