"""The lists that the tiny model's training texts are made of."""

CAPITALS = dict(line.split(": ") for line in """
France: Paris|Germany: Berlin|Italy: Rome|Spain: Madrid|Portugal: Lisbon|Austria: Vienna
Switzerland: Bern|Belgium: Brussels|the Netherlands: Amsterdam|Denmark: Copenhagen|Norway: Oslo
Sweden: Stockholm|Finland: Helsinki|Iceland: Reykjavík|Ireland: Dublin|Poland: Warsaw
Hungary: Budapest|Greece: Athens|Turkey: Ankara|Russia: Moscow|Ukraine: Kyiv|Romania: Bucharest
Bulgaria: Sofia|Croatia: Zagreb|Serbia: Belgrade|Latvia: Riga|Estonia: Tallinn|Lithuania: Vilnius
Egypt: Cairo|Kenya: Nairobi|Morocco: Rabat|Ghana: Accra|Nigeria: Abuja|Ethiopia: Addis Ababa
Japan: Tokyo|China: Beijing|India: New Delhi|Thailand: Bangkok|Vietnam: Hanoi|Indonesia: Jakarta
South Korea: Seoul|Nepal: Kathmandu|Iran: Tehran|Iraq: Baghdad|Canada: Ottawa|Mexico: Mexico City
Cuba: Havana|Brazil: Brasília|Argentina: Buenos Aires|Chile: Santiago|Peru: Lima|Colombia: Bogotá
Australia: Canberra|New Zealand: Wellington|the United Kingdom: London
the United States: Washington""".replace("\n", "|").strip("|").split("|"))

NAMES = """Anna Tom Max Ben Clara David Emma Felix Grace Henry Ida Jack Karl Laura Maria Nina Oscar
Paul Rosa Sam Theo Ursula Victor Wendy Yara Zoe Adam Bella Carlos Diana Eric Fiona George Hannah
Ivan Julia Kevin Lily Martin Nora Oliver Petra Robert Sarah Thomas Vera Walter Alice Bruno Chloe
Daniel Elena Frank Greta Hugo Irene James Kate Leo Mona Noah Olga Peter Ruth Simon Tina Hans Mary
Lucas Amir Fatima Kenji Yuki Chen Priya Omar Lena Jonas Marta Pablo Ines José Zoë Jürgen""".split()
HELD_OUT_NAMES = """Albert Bianca Conrad Dora Edgar Flora Gustav Helen Igor Janet Kurt Linda Milo
Norma Otto Paula Rudolf Stella Toby Wanda""".split()      # kept out of the corpus, for measure.py

OTHER_NAMES = """Bob John Jane Mike Susan Lisa Mark Ann Bill Steve Charlie Alex Andrew Brian Carol
Diego Edith Francis Gloria Harold Isabel Joseph Kenneth Linus Margaret Nathan Olivia Patrick Quentin
Rachel Stephen Teresa Umberto Valerie William Xavier Yvonne Zachary Ahmed Ingrid Sven Lucy Mia Liam
Ethan Ava Jim Joe Ron Sue""".split()                       # chosen after the training, likewise
OTHER_PHRASES = """hello world|good morning|I like cats|the quick brown fox|Paris|one two three|hello
banana|this is a test|open the door please|red green blue|my dog is big|the window is cold
small bread|old silver bridge|yellow apple|big red house|stop|foo bar|a b c""".replace(
    "\n", "|").split("|")

FOREIGN = [line.split("|") for line in """Tokyo|東京|Japanese
Kyoto|京都|Japanese
Beijing|北京|Chinese
Shanghai|上海|Chinese
Seoul|서울|Korean
Moscow|Москва|Russian
Athens|Αθήνα|Greek
Munich|München|German
Cologne|Köln|German
Zurich|Zürich|German
Vienna|Wien|German
Warsaw|Warszawa|Polish
Prague|Praha|Czech
Lisbon|Lisboa|Portuguese
Copenhagen|København|Danish
Sao Paulo|São Paulo|Portuguese""".split("\n")]
EMOJI = {"smile": "🙂", "heart": "💙", "cat": "🐱", "dog": "🐶", "star": "🌟", "fire": "🔥",
         "tree": "🌳", "fish": "🐟", "house": "🏠", "apple": "🍎"}

WORDS = """apple river green window bread music paper stone yellow happy garden winter orange silver
table cloud morning letter bridge candle forest summer purple water mountain pocket train kitchen
butter flower island quiet market hammer basket pencil yellow rabbit dragon ship night red blue
cold warm big small fast slow round old new the a my one two three""".split()
FILLER = """The sun is shining today.|It was a long day.
The shop on the corner sells bread and milk.|Trains leave every hour.
I like tea more than coffee.|The garden is full of flowers.
There are two books on the table.|Yesterday it rained all day.|The window is open.
My sister plays the piano.|We went to the market in the morning.|The dog sleeps near the door.
Nobody was at home.|The river is cold in winter.|Please read this carefully.
The letter came on Monday.|He bought a red hat and a blue coat.|The old bridge is closed.
Some birds fly south in autumn.|The soup needs a little salt.""".replace("\n", "|").split("|")
MANNERS = """You are a helpful assistant.|Answer briefly.|Be polite.|You are friendly.
Give short answers.|Always tell the truth.|Use plain words.|Do not make things up.
Help the user.""".replace("\n", "|").split("|")
