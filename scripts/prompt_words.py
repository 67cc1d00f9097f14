# ruff: noqa: E501
# fmt: off
"""What the frames of compose_prompts.py are filled with: subjects, tasks, names and so on, by the name of the gap."""

SUBJECTS = """
photosynthesis; the water cycle; black holes; inflation; compound interest; machine learning; neural networks; gravity; tides;
earthquakes; volcanoes; vaccines; antibiotics; the immune system; blood pressure; sleep; dreams; memory; stress; meditation;
the French Revolution; the Roman Empire; the Industrial Revolution; the Silk Road; the Cold War; democracy; the stock market;
supply and demand; taxes; insurance; mortgages; credit cards; budgeting; retirement savings; climate change; solar panels;
wind power; nuclear energy; batteries; electric cars; recycling; composting; bees; whales; dolphins; octopuses; migration of birds;
dinosaurs; fossils; evolution; DNA; genetics; cells; viruses; bacteria; the heart; the brain; the lungs; digestion; muscles;
the solar system; the Moon; Mars; comets; galaxies; light; sound; electricity; magnets; atoms; the periodic table; acids and bases;
rust; fermentation; baking bread; making cheese; coffee; tea; chocolate; olive oil; spices; vegetarian cooking; knife skills;
gardening; houseplants; pruning roses; growing herbs; lawns; cats; dogs; goldfish; horses; hamsters; chess; football; tennis;
swimming; running a marathon; yoga; cycling; climbing; hiking; camping; photography; painting; drawing; playing the guitar;
playing the piano; jazz; opera; poetry; novels; Shakespeare; theatre; film editing; public speaking; job interviews; teamwork;
leadership; time management; procrastination; writing a CV; negotiating; remote work; meetings; e-mail; spreadsheets; databases;
the internet; Wi-Fi; Bluetooth; passwords; encryption; phishing; cloud storage; web browsers; search engines; operating systems;
compilers; recursion; hash tables; binary search; linked lists; stacks and queues; sorting algorithms; graphs; dynamic programming;
object-oriented programming; functional programming; version control; unit tests; REST interfaces; SQL joins; indexes in databases;
threads; caching; regular expressions; floating point numbers; Unicode; time zones; fractions; percentages; prime numbers;
the Pythagorean theorem; probability; averages; negative numbers; logarithms; derivatives; integrals; matrices; sets; functions;
maps and compasses; weather forecasts; hurricanes; deserts; rainforests; oceans; rivers; mountains; glaciers; coral reefs; islands;
trains; bridges; skyscrapers; aeroplanes; ships; submarines; rockets; satellites; GPS; clocks; calendars; money; paper; glass;
concrete; steel; plastic; cotton; silk; wool; dyes; soap; perfume; mirrors; lenses; microscopes; telescopes; cameras; printing;
alphabets; languages; translation; grammar; punctuation; dictionaries; libraries; museums; schools; universities; hospitals;
courts; elections; constitutions; newspapers; advertising; marketing; brands; start-ups; small shops; restaurants; hotels; airports
"""
ACTIVITIES = """
learn a new language; train a puppy; plan a birthday party; move to a new flat; write a short story; clean an oven; save money every month;
repair a flat tyre; start a vegetable garden; choose a laptop; pack for a week in the mountains; prepare for an exam; cook rice;
make pancakes; bake a chocolate cake; build a bookshelf; paint a room; organise a kitchen; back up my photos; set up a home network;
write a cover letter; ask for a pay rise; run five kilometres; fall asleep faster; drink less coffee; read more books; host a dinner;
learn to swim; sew a button; iron a shirt; remove a coffee stain; grow basil; keep a diary; start a blog; record a podcast;
make a website; write a speech; give feedback to a colleague; lead a meeting; plan a road trip; visit Rome in three days;
travel with small children; take better photos; play chess; draw a face; learn touch typing; write clean code; debug a program;
deploy a web application; design a database; write documentation; review code; learn Python; install Linux; protect a password;
compare two phone contracts; sell a used car; buy a bicycle; train for a marathon; cook for ten people; store vegetables;
reduce waste at home; care for a cactus; make friends in a new city; apologise to a friend; calm down before a talk; study history;
teach a child to read; teach fractions; organise a school trip; choose a present for my father; write a wedding toast; plan a budget
"""
AUDIENCES = """
a child; a ten-year-old; a teenager; a beginner; a student; a busy manager; my grandmother; a curious friend; somebody who has never heard of it;
a new colleague; a class of twelve-year-olds; an engineer; a nurse; a shop owner; a tourist; a parent
"""
FORMS = """
in one sentence; in two sentences; in three sentences; in a short paragraph; in two paragraphs; in five bullet points; as a numbered list;
as a table; step by step; with an example; with three examples; with a comparison from daily life; in simple words; in about 100 words;
in about 150 words; in about 200 words; as a dialogue; as a list of questions and answers
"""
NAMES = """
Anna; Ben; Carla; David; Elif; Frank; Grace; Hana; Ivan; Julia; Karim; Lena; Marco; Nora; Oscar; Priya; Quentin; Rosa; Samir; Tara;
Umberto; Vera; Wen; Xenia; Yusuf; Zoe; Aisha; Bruno; Chloe; Diego; Emma; Farid; Greta; Hugo; Ines; Jonas; Kim; Liam; Maya; Noah
"""
FAMILY_NAMES = """
Adams; Becker; Costa; Dubois; Evans; Fischer; Garcia; Hoffmann; Ito; Jensen; Khan; Lopez; Moreau; Nilsson; O'Brien; Patel; Rossi; Silva;
Tanaka; Ungar; Vargas; Weber; Yilmaz; Zhang; Novak; Kowalski; Meyer; Brown; Green; Haddad
"""
TOWNS = """
Lisbon; Vienna; Oslo; Leeds; Porto; Lyon; Turin; Ghent; Krakow; Malmo; Cork; Basel; Seville; Dresden; Utrecht; Bergen; Bristol; Nantes;
Bologna; Tampere; Riverton; Oakfield; Lakeside; Hillview; Westbrook; Newport
"""
ITEMS = """
apples; pears; oranges; notebooks; pencils; pens; tickets; mugs; chairs; tables; lamps; shirts; socks; scarves; books; candles; plates;
bottles; boxes; bags; eggs; loaves; cakes; cookies; sandwiches; flowers; stamps; cards; balls; toys; bricks; tiles; cables; keyboards;
screens; phones; batteries; screws; paint cans; umbrellas
"""
PLACES = """
a shop; a market stall; a school; a library; a factory; a farm; a cafe; a bookshop; a museum; a theatre; a garden centre; a bakery in the old town;
a sports club; a small office; a warehouse; a hospital; a hotel; a restaurant; a workshop; a post office
"""
GENRES = """
a short story; a poem; a haiku; a fairy tale; a letter; an e-mail; a dialogue; a diary entry; a news report; a product description;
a speech; a review; a blog post; an advertisement; a song; a toast; a fable; a scene for a play; a limerick; a travel guide
"""
HEROES = """
a lighthouse keeper; a lost dog; a young inventor; an old sailor; a talking tree; a robot that wants to paint; two sisters; a night nurse;
a baker; a shy dragon; a mountain guide; a detective; a gardener; a postman; a violin teacher; a fox; a time traveller; an astronaut;
a train driver; a queen; a fisherman; a student in a new town; a clockmaker; a librarian; a taxi driver
"""
TONES = """
friendly; formal; polite; short; warm; funny; serious; clear; calm; encouraging; professional; simple
"""
LANGUAGES = "French; German; Spanish; Italian; Portuguese; Dutch"
PROGRAMMING = "Python; JavaScript; Java; C; C++; Go; Rust; TypeScript; Bash; SQL; Ruby; Kotlin"
LETTER_REASONS = """
I cannot come to the meeting on {day}; my order has not arrived; I want to change my appointment; the heating in my flat is broken;
I would like to apply for the position of {job}; I want to thank {name} for the help with the move; the invoice of {month} is wrong;
we are looking for volunteers; the office is closed on {day}; I would like to return {item} that I bought last week;
our team meets in another room from {month} on; I will be on holiday in {month}; I lost my key; the neighbours are too loud at night;
I want to invite the team to dinner on {day}; I need the report by {day}; the course begins one week later; I want to end my contract
"""
DAYS = "Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday"
MONTHS = "January; February; March; April; May; June; July; August; September; October; November; December"
JOBS = """
teacher; nurse; software engineer; cook; accountant; designer; gardener; carpenter; electrician; journalist; librarian; pilot;
translator; data analyst; sales assistant; project manager; receptionist; physiotherapist; architect; mechanic
"""
CODE_TASKS = """
reverses a string; checks whether a string is a palindrome; counts the vowels in a text; finds the largest number in a list;
removes duplicates from a list and keeps the order; computes the factorial of a number; returns the n-th Fibonacci number;
checks whether a number is prime; lists all primes up to n; sorts a list of dictionaries by a key; flattens a nested list;
counts how often each word occurs; finds two numbers that add up to a target; rotates a list by k places; transposes a matrix;
multiplies two matrices; converts Celsius to Fahrenheit; converts a Roman numeral to an integer; converts an integer to binary;
finds the longest common prefix of strings; finds the longest word in a sentence; checks whether brackets are balanced;
groups anagrams; reads a CSV file and prints the sum of a column; writes a list of rows to a CSV file; parses a date from a string;
computes the number of days between two dates; validates an e-mail address; generates a random password; counts lines in a file;
finds all files with a given extension in a folder; renames files in a folder; downloads a page and prints its title;
reads JSON from a file and prints the keys; merges two dictionaries; inverts a dictionary; chunks a list into pieces of size n;
computes the median of a list; computes the standard deviation; finds the second largest value; finds missing numbers in a range;
implements binary search; implements bubble sort; implements quicksort; implements merge sort; implements a stack; implements a queue;
implements a linked list with insert and delete; implements a binary tree with insertion and traversal; implements a least recently used cache;
computes the greatest common divisor; finds the shortest path in a graph with breadth-first search; counts islands in a grid;
prints a multiplication table; prints a triangle of stars; plays rock, paper, scissors; plays hangman; simulates rolling two dice;
computes compound interest; converts seconds to hours, minutes and seconds; formats a number with thousands separators;
capitalises the first letter of every word; removes punctuation from a text; encodes a text with the Caesar cipher; counts characters;
checks whether two strings are anagrams; sums the digits of a number; checks whether a year is a leap year; finds common elements of two lists;
computes a moving average; draws a simple bar chart with characters; times how long another function takes; retries a function three times;
caches the results of another function; reads numbers from the user until an empty line; logs messages to a file with a time stamp
"""
CODE_EXTRAS = """
; Add a docstring.; Add comments.; Explain how it works.; Include an example of how to use it.; Add type hints.; Handle invalid input.;
Add three tests.; Keep it short.; Use only the standard library.; What is its time complexity?; Do not use built-in functions for it.
"""
PAIRS = """
a list|a tuple; a stack|a queue; HTTP|HTTPS; TCP|UDP; a virus|a bacterium; weather|climate; mass|weight; speed|velocity; a simile|a metaphor;
affect|effect; a crocodile|an alligator; a process|a thread; an array|a linked list; a class|an object; stocks|bonds; a debit card|a credit card;
butter|margarine; jam|marmalade; baking soda|baking powder; a frog|a toad; an asteroid|a comet; renting|buying a home; a virus|a worm;
supervised learning|unsupervised learning; SQL|NoSQL; RAM|storage; a compiler|an interpreter; a city|a town; mean|median; permutations|combinations;
arteries|veins; plant cells|animal cells; coffee|tea; a novel|a short story; empathy|sympathy; a contract|an agreement; git merge|git rebase
"""
FACTS = """
What is the capital of {country}?; Which language is spoken in {country}?; Name five cities in {country}.; What is {country} famous for?;
How far is the {body} from the Earth?; Who was {person}?; What did {person} discover or create?; When did {person} live?;
Name three rivers in {country}.; Describe the flag of {country}.; What do people eat in {country}?; Plan three days in {country}.
"""
COUNTRIES = """
France; Spain; Italy; Germany; Norway; Sweden; Poland; Greece; Turkey; Egypt; Kenya; Morocco; India; China; Japan; Korea; Vietnam;
Thailand; Australia; Canada; Mexico; Brazil; Argentina; Chile; Peru; Portugal; Austria; Ireland; Iceland; Finland; Hungary; Croatia
"""
BODIES = "Moon; Sun; planet Mars; planet Venus; planet Jupiter; star Sirius"
PERSONS = """
Marie Curie; Isaac Newton; Albert Einstein; Ada Lovelace; Alan Turing; Leonardo da Vinci; Cleopatra; Julius Caesar; Napoleon; Mozart;
Beethoven; Frida Kahlo; Vincent van Gogh; Charles Darwin; Galileo Galilei; Florence Nightingale; Nikola Tesla; Jane Austen; Homer;
Nelson Mandela; Mahatma Gandhi; Amelia Earhart; Johannes Gutenberg; Rosa Parks; Aristotle
"""


def choices(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";")]


LISTS = {
    "subject": choices(SUBJECTS),
    "activity": choices(ACTIVITIES),
    "audience": choices(AUDIENCES),
    "form": choices(FORMS),
    "name": choices(NAMES),
    "family": choices(FAMILY_NAMES),
    "town": choices(TOWNS),
    "items": choices(ITEMS),
    "place": choices(PLACES),
    "genre": choices(GENRES),
    "hero": choices(HEROES),
    "tone": choices(TONES),
    "language": choices(LANGUAGES),
    "programming": choices(PROGRAMMING),
    "day": choices(DAYS),
    "month": choices(MONTHS),
    "job": choices(JOBS),
    "task": choices(CODE_TASKS),
    "extra": choices(CODE_EXTRAS),
    "country": choices(COUNTRIES),
    "body": choices(BODIES),
    "person": choices(PERSONS),
}
LISTS["item"] = [f"the {item}" for item in LISTS["items"]]
